"""Command lines of Megatron-LM, DeepSpeed and Hugging Face's Trainer, in this program's words.

`table` says what an entry is. `megatron_...`, `deepspeed` and `huggingface` hold the entries, and docs/megatron.md is
made from them. `translate` rewrites a command line. Pure; imports nothing but `config.limits`. Begin with `table`.
"""
