"""Reports: programs that make the tables and pictures of docs, from formulas and rehearsals."""
