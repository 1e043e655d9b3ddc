(() => {
  const SVG = "http://www.w3.org/2000/svg", LABEL = 108, ROW = 20, GAP = 4, AXIS = 24;
  const data = JSON.parse(document.getElementById("spans").textContent);
  const lanes = Timeline.decode(data), whole = data.end / data.tick || 1;
  const chunks = 1 + lanes.reduce((most, lane) => { for (let i = 0; i < lane.count; i++) most = Math.max(most, Timeline.chunk(lane, i)); return most; }, 0);
  const svg = document.getElementById("lanes"), tip = document.getElementById("tip"), chart = document.getElementById("chart");
  let view = [0, Timeline.warmUp(data, lanes, whole)], drawn = null, asked = false;

  function element(parent, tag, attributes, text) {
    const made = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  const top = (row) => AXIS + row * (ROW + GAP) + (lanes.length ? lanes[row].rank - lanes[0].rank : 0) * (both ? GAP : 0);
  const both = lanes.some((lane) => lane.source === "measured");

  function draw() {
    asked = false;
    const width = Math.max(svg.clientWidth - LABEL - 8, 100);
    const height = lanes.length ? top(lanes.length - 1) + ROW + GAP : AXIS;
    svg.setAttribute("height", height);
    svg.replaceChildren();
    const [from, to] = view, scale = width / (to - from);
    const axis = Timeline.ticks(from * data.tick, to * data.tick, Math.max(2, width / 110));
    for (const tick of axis.found) {
      const x = LABEL + (tick / data.tick - from) * scale;
      element(svg, "line", { class: "rule", x1: x, x2: x, y1: AXIS - 6, y2: height });
      element(svg, "text", { class: "soft", x: x + 3, y: AXIS - 10 }, Timeline.time(tick, data.unit, axis.step));
    }
    lanes.forEach((lane, row) => drawLane(lane, row, from, to, width));
    drawn = { width, from, to };
  }

  function drawLane(lane, row, from, to, width) {
    const y = top(row);
    const group = element(svg, "g", { class: "lane", "data-rank": lane.rank, "data-source": lane.source });
    element(group, "text", { x: 8, y: y + 14 }, `pp ${lane.rank}`);
    if (both) element(group, "text", { class: "soft", x: 46, y: y + 14 }, lane.source);
    element(group, "rect", { class: "row", x: LABEL, y, width, height: ROW });
    const found = Timeline.pieces(lane, from, to, width, data.kinds.length);
    const paths = data.kinds.map(() => "");
    for (const { x, width: wide, shares } of found.columns) {
      let bottom = y + ROW;
      shares.forEach((share, kind) => {
        const high = Math.min(share * ROW, bottom - y);
        if (high > 0) paths[kind] += `M${LABEL + x} ${bottom.toFixed(1)}h${wide}v${-high.toFixed(1)}h${-wide}z`;
        bottom -= high;
      });
    }
    paths.forEach((path, kind) => path && element(group, "path", { class: `many ${data.kinds[kind]}`, d: path }));
    for (const { x, width: wide, i } of found.spans) {
      const chunk = Math.max(Timeline.chunk(lane, i), 0), number = Timeline.microbatch(lane, i);
      const box = { x: LABEL + x, y, width: wide - (wide > 6 ? 1 : 0), height: ROW, rx: wide > 8 ? 2 : 0 };
      const shade = (0.7 + (0.3 * (chunk + 1)) / chunks).toFixed(3);
      element(group, "rect", { ...box, class: `span ${data.kinds[Timeline.kind(lane, i)]}`, "fill-opacity": shade });
      if (number >= 0 && wide > 7 * String(number).length + 6)
        element(group, "text", { class: "number", x: LABEL + x + wide / 2, y: y + 14 }, number);
    }
  }

  function show(from, to) {
    view = Timeline.window(from, to, whole);
    hide();
    if (!asked) { asked = true; requestAnimationFrame(draw); }
  }

  function zoom(factor, at = (view[0] + view[1]) / 2) {
    show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }

  // Time and lane under a pointer.
  function under(event) {
    const box = svg.getBoundingClientRect(), y = event.clientY - box.top;
    const time = drawn.from + ((event.clientX - box.left - LABEL) / drawn.width) * (drawn.to - drawn.from);
    return { time, row: lanes.findIndex((_, row) => y >= top(row) && y < top(row) + ROW) };
  }

  function hide() {
    tip.hidden = true;
    svg.querySelector(".chosen")?.remove();
  }

  function tell(event) {
    const { time, row } = under(event);
    const lane = lanes[row], i = lane && time >= drawn.from ? Timeline.find(lane, time) : -1;
    hide();
    if (i < 0) return;
    const scale = drawn.width / (drawn.to - drawn.from);
    const x = Math.max((lane.start[i] - drawn.from) * scale, 0), end = Math.min((lane.end[i] - drawn.from) * scale, drawn.width);
    element(svg, "rect", { class: "chosen", x: LABEL + x, y: top(row), width: Math.max(end - x, 1), height: ROW });
    tip.textContent = Timeline.describe(data, lane, i).join("\n");
    tip.hidden = false;
    const box = chart.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = top(row) + ROW + 6 + "px";
  }

  let drag = null;
  svg.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, view }; svg.setPointerCapture(event.pointerId); });
  svg.addEventListener("pointerup", () => { drag = null; });
  svg.addEventListener("pointercancel", () => { drag = null; });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    if (!drag) return tell(event);
    const moved = ((event.clientX - drag.x) / drawn.width) * (drag.view[1] - drag.view[0]);
    show(drag.view[0] - moved, drag.view[1] - moved);
  });
  svg.addEventListener("dblclick", (event) => zoom(0.5, under(event).time));
  svg.addEventListener("wheel", (event) => {
    const length = view[1] - view[0];
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(event.deltaY / 300), under(event).time); }
    else if (event.deltaX) { event.preventDefault(); show(view[0] + (event.deltaX / drawn.width) * length, view[1] + (event.deltaX / drawn.width) * length); }
  }, { passive: false });
  svg.addEventListener("keydown", (event) => {
    const step = (view[1] - view[0]) / 8;
    const keys = { ArrowLeft: () => show(view[0] - step, view[1] - step), ArrowRight: () => show(view[0] + step, view[1] + step), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, whole) };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  const press = (id, action) => document.getElementById(id).addEventListener("click", action);
  press("zoom-in", () => zoom(0.5));
  press("zoom-out", () => zoom(2));
  press("zoom-all", () => show(0, whole));
  const fold = (open) => document.querySelectorAll(".tree details").forEach((one, number) => { one.open = open || number === 0; });
  press("unfold", () => fold(true));
  press("fold", () => fold(false));
  // A link may lead into what is folded.
  function reveal() {
    const target = document.getElementById(location.hash.slice(1));
    for (let one = target?.closest("details"); one; one = one.parentElement.closest("details")) one.open = true;
    target?.scrollIntoView({ block: "nearest" });
  }
  addEventListener("hashchange", reveal);
  reveal();
  addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((one) => { one.open = true; }); draw(); });
  new ResizeObserver(() => show(...view)).observe(chart);
  draw();
})();
