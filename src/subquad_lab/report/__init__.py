"""The HTML report, generated from the records of runs."""
