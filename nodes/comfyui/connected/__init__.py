"""Any MODEL, CLIP and VAE that ComfyUI has loaded, as a base model of the core.

Which architectures there are is a table: `trainer_core/models/architectures.py`.

live: the models as they are wired · check: refusals · model: the base model and its source · wired: what its parts
share · predicting: denoiser, conditions and layers · encoding: text, autoencoder and control pictures · vision: what
CLIP vision says of frames · host: ComfyUI, which moves the weights and draws the samples · denoiser: raw predictions ·
text and vae: through CLIP and VAE · noise: levels and kind of prediction, read from the MODEL's sampling · experts:
models of two files, and which levels are whose · architecture: its row, and remarks · layers: what can be trained ·
names: in LoRA files · gradients: what is in their way, and is put back · trial: what an architecture in no list does
with them · proof: that its gradients are right · observed: a pass, operator by operator · filed: what ComfyUI makes of
its file · frozen: weights in any precision, of which nothing is kept · identity: hashes of models without files ·
sampling: samples by ComfyUI's own sampler
"""
