"""Pages, tables and charts: what people look at, made of plain data."""
