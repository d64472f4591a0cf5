"""Worker: fetches due deliveries, runs their handlers and settles them."""
