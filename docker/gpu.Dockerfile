# mhe_jax for NVIDIA GPUs; the host has the driver and the NVIDIA Container Toolkit.
#
#     docker build -f docker/gpu.Dockerfile -t mhe-jax:gpu .
#     docker run --rm --gpus all -v "$PWD/runs:/mhe/runs" -v "$PWD/data:/mhe/data" mhe-jax:gpu train multi30k
FROM python:3.12-slim
COPY . /opt/mhe_jax
RUN pip install --no-cache-dir '/opt/mhe_jax[cuda,demo,report,cloud]' -c /opt/mhe_jax/constraints.txt
WORKDIR /mhe
ENTRYPOINT ["mhe-jax"]
