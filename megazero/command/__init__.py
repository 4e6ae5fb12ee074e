"""The command `pretrain_gpt.py`, from its flags to its exit code: predict, rehearse, or prepare and train.

Modules of this folder need torch. `pretrain_gpt.py` imports them once the flags are accepted.
"""
