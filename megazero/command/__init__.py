"""The command `pretrain_gpt.py`, from its flags to its exit code: predict, rehearse, or prepare and train.

Begin with `pretrain`, which imports the other modules once the flags are accepted, because they need torch.
"""
