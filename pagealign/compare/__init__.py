"""``pagealign compare``: page-aligned, varlen-gather and page-size-1 on the same work."""
