# mhe_jax for TPU VMs and GKE; the IMAGE of docs/pods.md.
#
#     docker build -f docker/tpu.Dockerfile -t mhe-jax:tpu .
#     docker run --rm --privileged --net host -v "$PWD/runs:/mhe/runs" mhe-jax:tpu train demo
FROM python:3.12-slim
COPY . /opt/mhe_jax
RUN pip install --no-cache-dir '/opt/mhe_jax[tpu,demo,report,cloud]' -c /opt/mhe_jax/constraints.txt
WORKDIR /mhe
ENTRYPOINT ["mhe-jax"]
