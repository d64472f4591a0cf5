"""What runs for a long time: the worker, subscribers, heartbeats."""
