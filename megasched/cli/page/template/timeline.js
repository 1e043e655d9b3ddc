"use strict";
// What of the timeline needs no page: which spans are seen, what is drawn for them, and which one lies under a pointer.
const Timeline = (() => {
  const FIELDS = 6; // kind, micro-batch, chunk, gap, length, name: see megasched/cli/page/page.py
  const SMALL = 3; // pixels; what is narrower is drawn together with its neighbours
  const BIN = 4; // pixels of a column of such a drawing

  function decode(data) {
    return data.lanes.map((lane) => {
      const count = lane.spans.length / FIELDS;
      const start = new Float64Array(count), end = new Float64Array(count);
      let time = 0;
      for (let i = 0; i < count; i++) {
        start[i] = time + lane.spans[FIELDS * i + 3];
        time = end[i] = start[i] + lane.spans[FIELDS * i + 4];
      }
      return { rank: lane.rank, source: lane.source, count, start, end, numbers: lane.spans };
    });
  }

  const kind = (lane, i) => lane.numbers[FIELDS * i];
  const microbatch = (lane, i) => lane.numbers[FIELDS * i + 1];
  const chunk = (lane, i) => lane.numbers[FIELDS * i + 2];
  const name = (lane, i) => lane.numbers[FIELDS * i + 5];

  // The first span that ends after a time.
  function first(lane, time) {
    let low = 0, high = lane.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.end[middle] > time) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // The span at a time, or -1.
  function find(lane, time) {
    const i = first(lane, time);
    return i < lane.count && lane.start[i] <= time ? i : -1;
  }

  // What is drawn between two times over so many pixels: spans, and for those too small to be told apart columns of
  // BIN pixels with the share of time that each kind takes of them.
  function pieces(lane, from, to, width, kinds) {
    const scale = width / (to - from), spans = [], columns = new Map();
    for (let i = first(lane, from); i < lane.count && lane.start[i] < to; i++) {
      const x = Math.max((lane.start[i] - from) * scale, 0), end = Math.min((lane.end[i] - from) * scale, width);
      if (end - x >= SMALL) {
        spans.push({ x, width: end - x, i });
        continue;
      }
      const column = Math.floor((x + end) / 2 / BIN);
      if (!columns.has(column)) columns.set(column, new Array(kinds).fill(0));
      columns.get(column)[kind(lane, i)] += (end - x) / BIN;
    }
    return { spans, columns: [...columns].map(([column, shares]) => ({ x: column * BIN, width: BIN, shares })) };
  }

  // Where to look first: at the warm-up of a long pipeline, which ends with the first rank's first backward, and as
  // much after it; at the whole of anything else.
  function warmUp(data, lanes, whole) {
    const lane = lanes.length > 1 && lanes[0].rank !== lanes[lanes.length - 1].rank ? lanes[0] : null;
    if (!lane) return whole;
    for (let i = 0; i < lane.count; i++)
      if (data.kinds[kind(lane, i)] === "backward") return 4 * lane.start[i] < whole ? 2 * lane.start[i] : whole;
    return whole;
  }

  // Round times for the axis, about so many.
  function ticks(from, to, about) {
    const rough = (to - from) / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
    const found = [];
    for (let n = Math.ceil(from / step); n * step <= to; n++) found.push(n * step);
    return { step, found };
  }

  // A part of the whole [0, end], no longer than it, no shorter than one in a million.
  function window_(from, to, end) {
    const length = Math.min(Math.max(to - from, end / 1e6), end);
    const begin = Math.min(Math.max(from, 0), end - length);
    return [begin, begin + length];
  }

  // In words, as exact as the step, in the unit that fits the size.
  function time(value, unit, step, size = step) {
    const [factor, name] = unit !== "s" ? [1, ""] : size >= 0.5 ? [1, " s"] : size >= 5e-4 ? [1e3, " ms"] : [1e6, " µs"];
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step * factor) + 1e-4)));
    return (value * factor).toFixed(digits) + name;
  }

  // What is told of a span, line by line.
  function describe(data, lane, i) {
    const name_ = data.names[name(lane, i)], kind_ = data.kinds[kind(lane, i)];
    const lines = [`pp ${lane.rank}, ${lane.source}: ${name_ || kind_}`];
    if (microbatch(lane, i) >= 0) lines.push(`micro-batch ${microbatch(lane, i)}, chunk ${chunk(lane, i)}`);
    const [start, end] = [lane.start[i] * data.tick, lane.end[i] * data.tick];
    const size = Math.max(end - start, data.tick), tell = (value) => time(value, data.unit, size / 1000, size);
    lines.push(`${tell(start)} to ${tell(end)}, takes ${tell(end - start)}`);
    return lines;
  }

  return { decode, kind, microbatch, chunk, first, find, pieces, warmUp, ticks, window: window_, time, describe };
})();
