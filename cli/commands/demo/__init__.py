"""`motley demo`: several "machines" played on this one."""
