"""Slow, literal, float64 readings of the methods' formulas, as oracles. No code of the product.

Every function takes one image and returns a `Choice`. Its margin says how far the closest decision
was from its opposite, in units of what float32 may get wrong there; at or below 1 another
implementation in float32 may rightly decide otherwise. Exact ties are decided by order and do not
count as close. What the formulas leave open is handled as docs/methods.md says: above all, tokens
that are not finite come after all others, in original order.
"""
