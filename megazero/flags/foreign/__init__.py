"""Command lines of Megatron-LM, DeepSpeed and Hugging Face's Trainer, translated into flags of this program.

The `.toml` files hold the flags, and docs/results/flags.md is generated from them. `flag_table` reads them,
`value_conversions` computes values, `translate` rewrites a command line. Pure. Begin with `flag_table`.
"""
