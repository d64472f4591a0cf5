"""The compact set of ids that were seen."""
