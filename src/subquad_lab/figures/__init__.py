"""What is made of numbers: intervals, measures, tables and pictures."""
