"""The compiler's passes: each a pure function of one idea, valid before and valid after."""
