#!/bin/sh
# What the tests of the console need beside Python: Chromium with its driver, and axe-core, which is
# no part of servd. Without rights, apt or a network the tests are skipped, and say so.
folder=$(dirname "$0")/.axe
if ! command -v chromedriver >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } ||
    echo "Chromium could not be installed"
fi
if ! [ -e "$folder/axe.min.js" ]; then
  mkdir -p "$folder" &&
    (cd "$folder" && npm pack --silent axe-core@4.11 && tar xf axe-core-*.tgz --strip-components 1 package/axe.min.js) ||
    echo "axe-core could not be downloaded"
fi
