"""Several models behind one port."""
