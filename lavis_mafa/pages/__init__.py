"""Create HTML pages, tables and charts from plain data."""
