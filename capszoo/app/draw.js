// A canvas to draw on, white on black. `onDrawing(canvas)` is called when a stroke ends and, with an `interval`, while
// it is drawn, at most every so many milliseconds; `onDrawing(null)` when the drawing is cleared. Used by the app's
// page and by the documentation.
function capszooCanvas(canvas, clearButton, onDrawing, interval = Infinity) {
  const context = canvas.getContext("2d", { willReadFrequently: true });
  let drawing = false;
  let lastCall = 0;

  function clear() {
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [
      ((event.clientX - box.left) * canvas.width) / box.width,
      ((event.clientY - box.top) * canvas.height) / box.height,
    ];
  }

  function report(force) {
    if (!force && performance.now() - lastCall < interval) return;
    lastCall = performance.now();
    onDrawing(canvas);
  }

  canvas.addEventListener("pointerdown", (event) => {
    drawing = true;
    canvas.setPointerCapture(event.pointerId);
    context.strokeStyle = "#fff";
    context.lineWidth = canvas.width / 14;
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(...place(event));
    context.arc(...place(event), 0.5, 0, 2 * Math.PI); // a click is a dot
    context.stroke();
    context.beginPath();
    context.moveTo(...place(event));
    event.preventDefault();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    context.lineTo(...place(event));
    context.stroke();
    report(false);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => {
      if (drawing) report(true);
      drawing = false;
    });
  }
  clearButton.addEventListener("click", () => {
    clear();
    onDrawing(null);
  });
  clear();
}
