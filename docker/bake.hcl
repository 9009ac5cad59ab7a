// docker buildx bake -f docker/bake.hcl            builds servd:cpu and servd:cuda
// docker buildx bake -f docker/bake.hcl cpu --push builds and pushes one of them
// Run it in the folder that has docker/. Attestations need a builder of the driver docker-container, and --push.

variable "IMAGE" {
  default = "servd"
}

// Of the tags; without one, the images have the tags `cpu` and `cuda` alone.
variable "VERSION" {
  default = ""
}

// With commas; without one, the image is for this machine.
variable "PLATFORMS" {
  default = ""
}

group "default" {
  targets = ["cpu", "cuda"]
}

target "common" {
  context = "."
  platforms = PLATFORMS == "" ? [] : split(",", PLATFORMS)
  attest = ["type=sbom", "type=provenance,mode=max"]
}

target "cpu" {
  inherits = ["common"]
  dockerfile = "docker/Dockerfile.cpu"
  tags = VERSION == "" ? ["${IMAGE}:cpu"] : ["${IMAGE}:cpu", "${IMAGE}:${VERSION}-cpu"]
}

// torch's wheels with CUDA are for both kinds of machine, too.
target "cuda" {
  inherits = ["common"]
  dockerfile = "docker/Dockerfile.cuda"
  tags = VERSION == "" ? ["${IMAGE}:cuda"] : ["${IMAGE}:cuda", "${IMAGE}:${VERSION}-cuda"]
}
