"""The commands of `optcc`, a module each: they read options, call the library and print what it returns."""
