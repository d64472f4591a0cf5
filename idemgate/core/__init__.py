"""Values and functions that all packages share. They send no command and import no client library."""
