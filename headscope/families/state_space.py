"""State spaces: Mamba and its kin carry a state from token to token."""

from headscope.families import Kind

KIND = Kind(
    classes=("Mamba", "MambaMixer", "Mamba2Mixer", "MambaLayer", "Mamba2Layer"),
    names=("mamba", "ssm"),
    instead="a state space carries a state from token to token",
    example="mamba",
    sizes={"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "state_size": 4, "time_step_rank": 2},
)
