"""The CRC-32 of a file from those of its pieces, which several ranks read at once."""

from __future__ import annotations

POLYNOMIAL = 0xEDB88320
"""CRC-32's polynomial as `zlib` has it: the highest bit is the coefficient of x to the power 0."""
ONE, X = 1 << 31, 1 << 30


def combine(first: int, second: int, second_size: int) -> int:
    """Return the CRC-32 of two pieces, the second of which has so many bytes.

    This is ``crc32_combine`` of zlib, which Python does not have: the first checksum is multiplied
    by x to the power of the second piece's bits, modulo CRC-32's polynomial.
    """
    return _multiply(_power_of_x(8 * second_size), first) ^ second


def _power_of_x(exponent: int) -> int:
    result, square = ONE, X
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return product
