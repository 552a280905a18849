// Classifies a drawn digit in the browser, with ONNX Runtime on the exported file. No server computes anything.
(function () {
  const CANVAS = 224;

  // Centre and scale a drawing as MNIST's digits were: 20 of 28 pixels, the centre of mass at the middle.
  function fitted(canvas, rows, cols) {
    const { width, height } = canvas;
    const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    let top = height, bottom = -1, left = width, right = -1;
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        if (pixels[4 * (y * width + x)] > 51) {
          top = Math.min(top, y); bottom = Math.max(bottom, y);
          left = Math.min(left, x); right = Math.max(right, x);
        }
      }
    }
    if (bottom < 0) return null;
    const across = right - left + 1, down = bottom - top + 1;
    const scale = (20 / 28) * Math.min(rows / down, cols / across);
    const small = [Math.max(1, Math.round(across * scale)), Math.max(1, Math.round(down * scale))];
    const crop = averaged(pixels, width, left, top, across, down, small[0], small[1]);
    let sum = 1e-9, sumX = 0, sumY = 0;
    crop.forEach((value, i) => {
      sum += value; sumX += value * (i % small[0]); sumY += value * Math.floor(i / small[0]);
    });
    const place = (middle, centre, room) => Math.min(Math.max(Math.round(middle - centre), 0), room);
    const dx = place(cols / 2, sumX / sum, cols - small[0]), dy = place(rows / 2, sumY / sum, rows - small[1]);
    const grey = new Float32Array(rows * cols);
    crop.forEach((value, i) => {
      grey[(dy + Math.floor(i / small[0])) * cols + dx + (i % small[0])] = value;
    });
    return grey;
  }

  // Means over the area that each pixel of the small picture covers.
  function averaged(pixels, width, left, top, across, down, newWidth, newHeight) {
    const out = new Float32Array(newWidth * newHeight);
    for (let y = 0; y < newHeight; y++) {
      for (let x = 0; x < newWidth; x++) {
        const y0 = Math.floor((y * down) / newHeight), y1 = Math.max(y0 + 1, Math.ceil(((y + 1) * down) / newHeight));
        const x0 = Math.floor((x * across) / newWidth), x1 = Math.max(x0 + 1, Math.ceil(((x + 1) * across) / newWidth));
        let sum = 0;
        for (let v = y0; v < y1; v++) for (let u = x0; u < x1; u++) sum += pixels[4 * ((top + v) * width + left + u)];
        out[y * newWidth + x] = sum / ((y1 - y0) * (x1 - x0));
      }
    }
    return out;
  }

  function probabilities(scores, kind) {
    if (kind === "lengths" || kind === "activations") {
      const positive = scores.map((s) => Math.max(s, 0));
      const sum = Math.max(positive.reduce((a, b) => a + b, 0), 1e-12);
      return positive.map((s) => s / sum);
    }
    const most = Math.max(...scores);
    const powers = scores.map((s) => Math.exp(s - most));
    const sum = powers.reduce((a, b) => a + b, 0);
    return powers.map((p) => p / sum);
  }

  // Multiples of an even share to a colour: blue, white at 1, red.
  function colour(share) {
    const stops = [[5, 48, 97], [67, 147, 195], [247, 247, 247], [214, 96, 77], [103, 0, 31]];
    const at = Math.min(Math.max(share / 2, 0), 1) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return stops[i].map((low, k) => Math.round(low + (stops[i + 1][k] - low) * (at - i)));
  }

  async function start(box) {
    const base = box.dataset.files;
    const status = box.querySelector(".status");
    if (location.protocol === "file:") {
      status.textContent =
        "Browsers fetch nothing for a page that was opened from a file: serve this folder (python -m http.server) to draw here.";
      return;
    }
    const about = await (await fetch(base + "model.json")).json();
    ort.env.wasm.wasmPaths = new URL(base, location.href).href;
    ort.env.wasm.numThreads = 1;
    const session = await ort.InferenceSession.create(base + "model.onnx", { executionProviders: ["wasm"] });
    const [rows, cols] = about.size;
    const overlay = box.querySelector(".overlay"), bars = box.querySelector(".capszoo-bars");

    // `grey`: rows * cols values in 0..255.
    async function classify(grey) {
      const begin = performance.now();
      const input = Float32Array.from(grey, (value) => (value / 255 - about.mean) / about.std);
      const feeds = { [session.inputNames[0]]: new ort.Tensor("float32", input, [1, 1, rows, cols]) };
      const found = await session.run(feeds);
      const scores = Array.from(found.scores.data);
      const shares = probabilities(scores, about.score_kind);
      const best = scores.indexOf(Math.max(...scores));
      const [, , types, h, w] = found.couplings.dims; // [1, n, types, h, w]; they sum to 1 over types and places
      const relative = new Float32Array(h * w);
      const start = best * types * h * w;
      for (let t = 0; t < types; t++)
        for (let p = 0; p < h * w; p++) relative[p] += found.couplings.data[start + t * h * w + p] * h * w;
      const milliseconds = performance.now() - begin;
      show(grey, relative, h, w);
      bars.replaceChildren(...scores.map((_, i) => bar(about.labels[i], shares[i])));
      status.textContent = `${about.labels[best]} (probability ${shares[best].toFixed(3)}), ${milliseconds.toFixed(0)} ms`;
      box.dataset.result = JSON.stringify({ label: about.labels[best], scores, probabilities: shares, milliseconds });
    }

    function bar(label, share) {
      const row = document.createElement("div");
      row.innerHTML = `<span>${label}</span><span class="bar" style="width:${(120 * share).toFixed(1)}px"></span>`;
      row.append(`${(100 * share).toFixed(1)}%`);
      return row;
    }

    function show(grey, relative, h, w) {
      overlay.width = cols;
      overlay.height = rows;
      const context = overlay.getContext("2d"), image = context.createImageData(cols, rows);
      const [[firstY, stepY], [firstX, stepX]] = about.centres; // of the cells' receptive fields, in pixels
      for (let y = 0; y < rows; y++) {
        for (let x = 0; x < cols; x++) {
          const i = y * cols + x;
          const row = Math.round((y + 0.5 - firstY) / stepY), column = Math.round((x + 0.5 - firstX) / stepX);
          const inside = row >= 0 && row < h && column >= 0 && column < w;
          const share = inside ? relative[row * w + column] : 1;
          const strength = 0.8 * Math.min(Math.abs(share - 1), 1), tint = colour(share);
          for (let k = 0; k < 3; k++) image.data[4 * i + k] = grey[i] * (1 - strength) + tint[k] * strength;
          image.data[4 * i + 3] = 255;
        }
      }
      context.putImageData(image, 0, 0);
    }

    function nothing() {
      bars.replaceChildren();
      overlay.getContext("2d").clearRect(0, 0, overlay.width, overlay.height);
      delete box.dataset.result;
      status.textContent = "Draw a digit.";
    }

    capszooCanvas(box.querySelector(".drawing"), box.querySelector("button"), (canvas) => {
      const grey = canvas && fitted(canvas, rows, cols);
      if (grey) classify(grey);
      else nothing();
    }, 150);
    const digits = box.parentElement.querySelector(".capszoo-digits");
    about.digits.forEach((url, k) => {
      const image = new Image();
      image.alt = `test image ${k}`;
      image.addEventListener("click", () => {
        const copy = document.createElement("canvas");
        copy.width = cols; copy.height = rows;
        const context = copy.getContext("2d");
        context.drawImage(image, 0, 0);
        const data = context.getImageData(0, 0, cols, rows).data;
        delete box.dataset.result;
        classify(Float32Array.from({ length: rows * cols }, (_, i) => data[4 * i]));
      });
      image.src = url;
      digits.append(image);
    });
    nothing();
    box.dataset.ready = "yes";
  }

  for (const box of document.querySelectorAll(".capszoo-demo")) {
    start(box).catch((error) => { box.querySelector(".status").textContent = `It does not start: ${error.message}`; });
  }
})();
