"""Pure: values in, values out. No I/O, no clock of its own, no client library."""
