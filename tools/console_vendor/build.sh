#!/bin/bash
# Builds src/argosy/gateway/console/static/vendor.js from pinned packages, and the file of their licences.
# Needs npm and Node 20. Run it after a version in package.json has changed, and commit the result.
set -euo pipefail
cd "$(dirname "$0")"
static=../../src/argosy/gateway/console/static
npm ci --no-audit --no-fund --silent
node_modules/.bin/esbuild vendor.js --bundle --format=esm --minify --legal-comments=none --log-level=warning \
  --outfile="$static/vendor.js"
cp node_modules/uplot/dist/uPlot.min.css "$static/uplot.css"
{
  echo "vendor.js and uplot.css contain these packages."
  for package in preact @preact/signals @preact/signals-core htm uplot; do
    version=$(node -p "require('./node_modules/$package/package.json').version")
    printf '\n%s\n%s %s\n\n' "----------------------------------------" "$package" "$version"
    cat "node_modules/$package/LICENSE"
  done
} > "$static/licences.txt"
