"""Operations that are programmed for a chip: one reference each, and what is faster where."""
