"""SwiftFormer's additive attention weighs queries into one and multiplies keys with it: no query sees a key."""

from headscope.families import Kind

KIND = Kind(
    classes=("EfficientAdditiveAttention",),
    instead="one weighted query multiplies every key",
    example="swiftformer",
    sizes={"image_size": 32, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 8, 8]},
)
