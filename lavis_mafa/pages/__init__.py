"""Pages, tables and charts for people, made of plain data."""
