"""Deformable attention weighs points that are sampled from a map; it has neither keys nor a score of query and key."""

from headscope.families import Kind

KIND = Kind(
    classes=("DeformableAttention",),
    instead="its softmax weighs sampled points, not keys",
    example="rt_detr",
)
