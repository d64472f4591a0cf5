"""Programs that judge the project and test nothing themselves; see README.md."""
