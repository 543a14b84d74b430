"""Change of layout as pure arithmetic: layouts, plans, their proof and their execution."""
