"""Forms of tool calls: how to read each, and the grammar that forces one."""
