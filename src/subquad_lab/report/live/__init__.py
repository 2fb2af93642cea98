"""The report as a local web page that follows the runs while they train."""
