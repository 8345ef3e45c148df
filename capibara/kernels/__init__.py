"""Operations with an implementation per platform: a reference for each, and faster ones beside it."""
