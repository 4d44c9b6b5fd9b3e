"""Bytes with the damage of disks, transfers or attackers."""

from __future__ import annotations

from hypothesis import strategies as st

PIECES = [
    b"\0" * 8,
    b"\xff" * 8,
    b"\n",
    b",",
    b'"',
    b"nan",
    b"1e999",
    b"-1",
    b"\xff\xfe",
    b"{",
    b"[" * 2000,
    b"9" * 400,
]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with one to three changes."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(made) - 1, 0)))
        match draw(st.integers(0, 6)):
            case 0:
                del made[at:]
            case 1:
                del made[at : at + draw(st.integers(1, 40))]
            case 2:
                made[at:at] = draw(st.sampled_from(PIECES) | st.binary(max_size=12))
            case 3:
                piece = draw(st.sampled_from(PIECES) | st.binary(max_size=12))
                made[at : at + len(piece)] = piece
            case 4:
                made[at:at] = made[max(0, at - draw(st.integers(1, 60))) : at]
            case _ if made:
                made[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(made)
