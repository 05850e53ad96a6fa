"""Random programs of PyTorch operators, run under psgrad's transforms and by a loop of plain torch.autograd.

`programs.py` has what a program is, `writer.py` writes random ones with the operators of `catalogue/`,
`backends.py` has the two sets of transforms, `modes.py` the nests of transforms, `checking.py` compares and
says what a difference is, `shrinking.py` makes a failing program small. `python -m tests.random_programs
--programs 20000 --seed 1` runs many.
"""
