"use strict";
// Draws the charts of the report from the numbers in #data. One cursor and one zoom for all.
// Texts from the file are set as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const plots = [];
  const SYNC = "steps";
  let palette = {};

  const hue = (name) => (palette[name] ??= getComputedStyle(root).getPropertyValue("--" + name).trim());
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Numbers as the summary writes them: four digits, integers in full.
  const number = (value) => {
    if (value === null || value === undefined) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 2 ** 33) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  };

  // The windows at which a bin begins, and the last one; the same in all charts.
  const run = data.run;
  const xs = [...new Set([...run.x, run.last.at(-1) ?? 0])];
  const place = new Map(xs.map((x, index) => [x, index]));
  const last = Math.max(data.axis ? data.axis.last : 0, 1);

  // The bin that holds window x; -1: none.
  const binAt = (x) => {
    let low = 0, high = run.x.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (run.x[middle] <= x) low = middle; else high = middle - 1;
    }
    return high >= 0 && run.x[low] <= x && x <= run.last[low] ? low : -1;
  };

  const stepText = (bin) => {
    const session = run.sessions.filter((start) => start <= run.x[bin]).length;
    const from = session > 0 ? run.sessions[session - 1] : 0;
    const [a, b] = [run.x[bin] - from, run.last[bin] - from];
    return `step ${a}` + (b > a ? ` to ${b}` : "") + (run.sessions.length > 1 ? ` of session ${session}` : "");
  };

  // Ticks of our own: on a logarithmic axis powers, and between them where there are few.
  const niceTicks = (min, max, most) => {
    const raw = (max - min) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
    const ticks = [];
    for (let i = Math.ceil(min / step - 1e-9); i * step <= max * (1 + 1e-12) + step * 1e-9; i++)
      ticks.push(Number((i * step).toPrecision(12)));
    return ticks;
  };
  const logTicks = (min, max, most, base) => {
    const powers = Math.log(max / min) / Math.log(base);
    if (base === 10 && powers < 1.2) return niceTicks(min, max, most).filter((tick) => tick > 0);
    const every = Math.max(1, Math.ceil(powers / most));
    const factors = base === 10 && powers < 3 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let e = Math.floor(Math.log(min) / Math.log(base)); base ** e <= max * 1.0001; e++)
      if (e % every === 0)
        for (const factor of factors) {
          const tick = base === 2 ? 2 ** e : Number(`${factor}e${e}`);
          if (tick >= min * 0.9999 && tick <= max * 1.0001) ticks.push(tick);
        }
    return ticks;
  };
  const tickText = (scale) => (value, index, all) => {
    if (scale === "log2" && all.some((tick) => tick >= 1e6 || tick < 1e-2)) return "2^" + Math.round(Math.log2(value));
    if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-4) && scale !== "log2")
      return value.toExponential().replace("+", "");
    return String(Number(value.toPrecision(6)));
  };

  const range = (chart) => (u, low, high) => {
    const log = chart.scale !== "linear";
    for (const limit of chart.limits) {
      low = low === null ? limit.y : Math.min(low, limit.y);
      high = high === null ? limit.y : Math.max(high, limit.y);
    }
    if (low === null || !(low <= high)) return log ? [1, 10] : [0, 1];
    if (log) {
      const least = chart.scale === "log2" ? 4 : 1.5;
      const pad = Math.max((high / low) ** 0.08, (least / (high / low)) ** 0.5, 1.02);
      return [Math.max(low / pad, 1e-300), Math.min(high * pad, 1e300)];
    }
    const pad = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
  };

  const xRange = (u, low, high) => {
    if (low === null || low === high) return [0, last];
    const pad = low <= xs[0] && high >= xs.at(-1) ? 0.008 * (high - low) : 0;
    return [low - pad, high + pad];
  };
  const isWhole = (u) => u.scales.x.min <= xs[0] && u.scales.x.max >= xs.at(-1);

  const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  const axes = (scale, width) => [
    {
      stroke: () => hue("soft"), font, gap: 6, size: 30,
      grid: { show: false },
      ticks: { stroke: () => hue("line"), size: 5 },
      border: { show: true, stroke: () => hue("line"), width: 1 },
      splits: (u, i, min, max) =>
        niceTicks(Math.max(min, 0), max, Math.max(2, Math.floor(u.bbox.width / devicePixelRatio / 80)))
          .filter(Number.isInteger),
      values: (u, ticks) => ticks.map((tick) => tick.toLocaleString("en")),
    },
    {
      stroke: () => hue("soft"), font, gap: 6, size: width,
      grid: { stroke: () => hue("line"), width: 1 },
      ticks: { show: false },
      filter: (u, ticks) => ticks,
      splits: (u, i, min, max) => {
        const most = Math.max(2, Math.floor(u.bbox.height / devicePixelRatio / 42));
        if (scale === "linear") return niceTicks(min, max, most);
        return logTicks(min, max, most, scale === "log2" ? 2 : 10);
      },
      values: (u, ticks) => ticks.map(tickText(scale)),
    },
  ];

  // A value for each of ``xs``.
  const spread = (values, holds) => {
    const found = new Array(xs.length).fill(null);
    values.forEach((value, bin) => { found[place.get(run.x[bin])] = value; });
    if (holds && values.length) found[place.get(run.last.at(-1))] ??= values.at(-1);
    return found;
  };

  const clipped = (u, draw) => {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    draw(u.ctx, devicePixelRatio);
    u.ctx.restore();
  };

  const drawSessions = (u) => {
    const starts = data.axis.sessions;
    if (!starts.length) return;
    clipped(u, (ctx, px) => {
      ctx.strokeStyle = ctx.fillStyle = hue("soft");
      ctx.lineWidth = px;
      ctx.font = `${11 * px}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      ctx.setLineDash([px, 3 * px]);
      let free = -Infinity;
      starts.forEach(([session, x]) => {
        const at = Math.round(u.valToPos(x, "x", true));
        ctx.beginPath();
        ctx.moveTo(at, u.bbox.top);
        ctx.lineTo(at, u.bbox.top + u.bbox.height);
        ctx.stroke();
        if (at < free) return;
        ctx.fillText(`session ${session}`, at + 4 * px, u.bbox.top + 2 * px);
        free = at + 76 * px;
      });
    });
  };

  const drawLimits = (u, chart) => clipped(u, (ctx, px) => {
    ctx.strokeStyle = ctx.fillStyle = hue("ink");
    ctx.lineWidth = 1.25 * px;
    ctx.font = `${11 * px}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    for (const limit of chart.limits) {
      const at = Math.round(u.valToPos(limit.y, "y", true));
      ctx.setLineDash([5 * px, 4 * px]);
      ctx.beginPath();
      ctx.moveTo(u.bbox.left, at);
      ctx.lineTo(u.bbox.left + u.bbox.width, at);
      ctx.stroke();
      const below = at - u.bbox.top < 18 * px;
      ctx.textBaseline = below ? "top" : "bottom";
      const text = limit.label;
      const right = u.bbox.left + u.bbox.width - 4 * px;
      const y = at + (below ? 3 : -3) * px;
      ctx.lineJoin = "round";
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * px;
      ctx.strokeStyle = hue("paper");
      ctx.strokeText(text, right, y);
      ctx.fillText(text, right, y);
      ctx.strokeStyle = hue("ink");
      ctx.lineWidth = 1.25 * px;
    }
  });

  const drawMarks = (u, chart, hidden) => clipped(u, (ctx, px) => {
    chart.marks.forEach((marks, index) => {
      if (hidden.has("m" + index)) return;
      ctx.strokeStyle = ctx.fillStyle = hue(marks.hue);
      ctx.lineWidth = (marks.shape === "tick" ? 1 : 1.75) * px;
      ctx.beginPath();
      marks.bins.forEach((bin, i) => {
        const x = u.valToPos((run.x[bin] + run.last[bin]) / 2, "x", true);
        const edge = marks.shape === "tick" ? u.bbox.top + u.bbox.height - 9 * px : u.bbox.top + 7 * px;
        const y = marks.y[i] === null ? edge : u.valToPos(marks.y[i], "y", true);
        const r = 3.6 * px;
        if (marks.shape === "tick") {
          ctx.moveTo(x, y - r); ctx.lineTo(x, y + r);
        } else if (marks.shape === "cross") {
          ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r);
          ctx.moveTo(x - r, y + r); ctx.lineTo(x + r, y - r);
        } else {
          ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y - r); ctx.lineTo(x, y + r); ctx.closePath();
        }
      });
      if (marks.shape === "triangle") ctx.fill(); else ctx.stroke();
    });
  });

  // A legend whose entries show the values at the cursor, and hide what they name when clicked.
  const legend = (holder, chart, toggle) => {
    const list = make("div", "legend");
    const head = make("span", "at");
    list.append(head);
    const chips = [];
    const chip = (key, label, sample, title) => {
      const button = make("button", "chip");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.title = title;
      const value = make("b", "value");
      button.append(sample, make("span", "name", label), value);
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        toggle(key, shown);
      });
      list.append(button);
      chips.push(value);
      return value;
    };
    chart.lines.forEach((line, index) => {
      const sample = make("i", "sample");
      sample.style.borderTop = `3px solid var(--${line.hue})`;
      chip("l" + index, line.label, sample, line.per_bin || "hide or show");
    });
    chart.marks.forEach((marks, index) => {
      const sample = make("i", "glyph", { cross: "✕", triangle: "▼", tick: "|" }[marks.shape]);
      sample.style.color = `var(--${marks.hue})`;
      chip("m" + index, marks.label, sample, "hide or show");
    });
    holder.append(list);
    return (x) => {
      const idle = x === null;
      head.textContent = headOf(x);
      chart.lines.forEach((line, index) => {
        const bin = idle ? line.y.findLastIndex((y) => y !== null) : binAt(x);
        let text = bin < 0 ? "–" : number(line.y[bin]);
        if (bin >= 0 && line.low.length && line.low[bin] !== null && line.low[bin] < line.high[bin])
          text += ` (${number(line.low[bin])} – ${number(line.high[bin])})`;
        chips[index].textContent = text;
      });
      chart.marks.forEach((marks, index) => {
        const here = !idle && marks.bins.includes(binAt(x));
        chips[chart.lines.length + index].textContent = here ? "here" : "";
      });
    };
  };

  const headOf = (x) => {
    if (x === null) return "last";
    const bin = binAt(x);
    return bin < 0 ? `step ${x}` : stepText(bin);
  };

  const cursor = {
    sync: { key: SYNC, scales: ["x", null], setSeries: false },
    drag: { x: true, y: false, dist: 4 },
    focus: { prox: -1 },
    y: false,
  };
  const pointOf = (u, index) => (u.series[index].hover ? make("div", "point") : undefined);

  const xAt = (u) => (u.cursor.left >= 0 && u.cursor.idx !== null && u.cursor.idx !== undefined ? xs[u.cursor.idx] : null);

  const watchKeys = (u, title) => {
    u.over.tabIndex = 0;
    u.over.setAttribute("aria-label", title + ": arrow keys move the cursor");
    u.over.setAttribute("role", "slider");
    const tell = (index) => {
      u.over.setAttribute("aria-valuenow", xs[index]);
      u.over.setAttribute("aria-valuetext", u.readout());
    };
    u.over.setAttribute("aria-valuemin", xs[0]);
    u.over.setAttribute("aria-valuemax", xs.at(-1));
    u.over.setAttribute("aria-valuenow", xs.at(-1));
    u.over.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (event.key === "Escape") { resetZoom(); return; }
      if (move === undefined) return;
      event.preventDefault();
      const from = u.cursor.left >= 0 && u.cursor.idx != null ? u.cursor.idx : move > 0 ? -1 : xs.length;
      const index = Math.min(xs.length - 1, Math.max(0, from + move));
      u.setCursor({ left: u.valToPos(xs[index], "x"), top: u.bbox.height / devicePixelRatio / 2 }, true, true);
      tell(index);
    });
  };

  const zoomButton = document.getElementById("zoom");
  const resetZoom = () => plots.forEach((u) => u.setScale("x", { min: xs[0], max: xs.at(-1) }));
  const onScale = (u, key) => {
    if (key === "x") zoomButton.hidden = isWhole(u);
  };
  zoomButton.addEventListener("click", resetZoom);

  const register = (u, holder, height) => {
    plots.push(u);
    u.over.addEventListener("mouseenter", () => u.syncRect(true)); // a table above may have opened
    u.fit = (width) => u.setSize({ width, height });
    new ResizeObserver(() => {
      const width = holder.clientWidth;
      if (width > 0 && width !== u.width) u.fit(width);
    }).observe(holder);
  };

  const drawChart = (chart) => {
    const figure = document.getElementById("chart-" + chart.name);
    const holder = figure.querySelector(".plot");
    const title = figure.querySelector("h3").textContent;
    const height = chart.name === "loss" ? 290 : 230;
    const hidden = new Set();
    let u, show;
    const toggle = (key, shown) => {
      if (shown) hidden.delete(key); else hidden.add(key);
      if (key[0] === "m") { u.redraw(false); return; }
      u.batch(() => u.series.forEach((series, index) => {
        if (series.line === Number(key.slice(1))) u.setSeries(index, { show: shown });
      }));
    };
    show = legend(figure.querySelector(".readout"), chart, toggle);
    const build = () => {
      const series = [{}], bands = [], columns = [xs];
      chart.lines.forEach((line, index) => {
        const common = {
          spanGaps: true, line: index, show: !hidden.has("l" + index),
          paths: line.holds ? uPlot.paths.stepped({ align: 1 }) : undefined,
        };
        const few = line.y.filter((y) => y !== null).length < 3;
        if (line.low.length) {
          const at = series.length;
          for (const values of [line.high, line.low]) {
            series.push({ ...common, width: 0, points: { show: false } });
            columns.push(spread(values, line.holds));
          }
          bands.push({ series: [at, at + 1], fill: () => hue(line.hue) + "38" });
        }
        series.push({
          ...common, hover: true,
          stroke: () => hue(line.hue), width: 1.75,
          points: { show: few, size: 6, fill: () => hue(line.hue) },
        });
        columns.push(spread(line.y, line.holds));
      });
      u = new uPlot({
        width: holder.clientWidth, height, series, bands, legend: { show: false }, padding: [10, 24, 0, 0],
        cursor: { ...cursor, points: { show: pointOf } },
        scales: {
          x: { time: false, range: xRange },
          y: { distr: chart.scale === "linear" ? 1 : 3, log: chart.scale === "log2" ? 2 : 10, range: range(chart) },
        },
        axes: axes(chart.scale, 62),
        hooks: {
          drawAxes: [drawSessions],
          draw: [(made) => drawLimits(made, chart), (made) => drawMarks(made, chart, hidden)],
          setCursor: [(made) => show(xAt(made))],
          setScale: [onScale],
        },
      }, columns, holder);
      u.readout = () => figure.querySelector(".readout").textContent;
      register(u, holder, height);
      watchKeys(u, title);
    };
    build();
    show(null);
    addScaleSwitch(figure, chart, () => {
      const { min, max } = u.scales.x;
      plots.splice(plots.indexOf(u), 1);
      u.destroy();
      build();
      u.setScale("x", { min, max });
    });
  };

  // Linear or logarithmic, where every number allows both.
  const addScaleSwitch = (figure, chart, rebuild) => {
    const all = chart.lines.flatMap((line) => [...line.y, ...line.low]);
    if (chart.scale === "log2" || all.some((y) => y !== null && y <= 0)) return;
    const button = make("button", "switch", "log");
    button.type = "button";
    const tell = () => button.setAttribute("aria-pressed", String(chart.scale === "log"));
    button.title = "logarithmic or linear";
    button.addEventListener("click", () => {
      chart.scale = chart.scale === "log" ? "linear" : "log";
      tell();
      rebuild();
    });
    tell();
    figure.querySelector(".head").append(button);
  };

  // The heat map: a picture of one pixel a cell, stretched between the steps of its columns.
  const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128],
    [94, 201, 98], [173, 220, 48], [253, 231, 37]];
  const viridis = (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
    const index = Math.min(Math.floor(at), VIRIDIS.length - 2);
    return VIRIDIS[index].map((from, i) => Math.round(from + (VIRIDIS[index + 1][i] - from) * (at - index)));
  };
  const RED = [232, 76, 26], GREY = [140, 140, 140];

  const drawHeatmap = (heat) => {
    const figure = document.getElementById("chart-" + heat.name);
    const holder = figure.querySelector(".plot");
    const readout = figure.querySelector(".readout");
    const [rows, columns] = [heat.rows.length, heat.columns.length];
    const norms = Float32Array.from(heat.norms.flat(), (norm) => norm === null ? NaN : norm === -1 ? Infinity : norm);
    const image = make("canvas");
    [image.width, image.height] = [columns, rows];
    const context = image.getContext("2d");
    const cells = context.createImageData(columns, rows);
    const [low, high] = [Math.log(heat.low), Math.log(heat.high)];
    norms.forEach((norm, index) => {
      if (Number.isNaN(norm)) return;
      const color = norm === Infinity ? RED : norm === 0 ? GREY : viridis((Math.log(norm) - low) / (high - low));
      cells.data.set([...color, 255], 4 * index);
    });
    context.putImageData(cells, 0, 0);
    // A cell reaches half the way to its neighbours, so that the cursor is in the one it tells of;
    // the last one over the windows that it stands for.
    const gaps = heat.columns.slice(1).map((x, i) => x - heat.columns[i]);
    const end = heat.columns[columns - 1] + (gaps.length ? Math.min(...gaps) : 1) - 0.5;
    const edges = [heat.columns[0] - 0.5, ...gaps.map((gap, i) => heat.columns[i] + gap / 2), end];
    const columnAt = (x) => (x < end ? edges.findLastIndex((edge) => edge <= x) : -1);
    const height = Math.round(Math.min(640, Math.max(150, rows * 15))) + 44;
    const paint = (u) => clipped(u, (ctx) => {
      ctx.imageSmoothingEnabled = false;
      const { top, height: tall } = u.bbox;
      const [from, to] = [u.valToPos(0, "y", true), u.valToPos(rows, "y", true)];
      heat.columns.forEach((_, i) => {
        const [a, b] = [edges[i], edges[i + 1]].map((edge) => Math.round(u.valToPos(edge, "x", true)));
        ctx.drawImage(image, i, 0, 1, rows, a, Math.min(from, to), Math.max(1, b - a), Math.abs(to - from));
      });
    });
    const text = (norm) => (norm === Infinity ? "inf or NaN" : Number.isNaN(norm) ? "no norm" : number(norm));
    const head = make("span", "at"), told = make("span", "told");
    readout.append(head, told);
    const show = (u) => {
      const x = u ? xAt(u) : null;
      const column = x === null ? columns - 1 : columnAt(x);
      if (column < 0) { head.textContent = headOf(x); told.textContent = "no norms here"; return; }
      head.textContent = x === null ? "last" : headOf(heat.columns[column]);
      let row = -1;
      if (u && x !== null && u.cursor.event && u.over.matches(":hover")) row = Math.floor(u.posToVal(u.cursor.top, "y"));
      if (row >= 0 && row < rows) {
        told.textContent = `${heat.rows[row]}: ${text(norms[row * columns + column])}`;
        return;
      }
      let most = -1;
      for (let r = 0; r < rows; r++) {
        const norm = norms[r * columns + column];
        if (!Number.isNaN(norm) && (most < 0 || norm >= norms[most * columns + column])) most = r;
      }
      told.textContent = most < 0 ? "no norms here" : `largest: ${heat.rows[most]}: ${text(norms[most * columns + column])}`;
    };
    const isNarrow = () => holder.clientWidth < 620;
    const axis = axes("linear", 0);
    axis[1] = {
      ...axis[1], grid: { show: false }, font: "11px system-ui, sans-serif", stroke: () => hue("ink"),
      size: () => (isNarrow() ? 118 : 200),
      splits: (u) => {
        const every = Math.ceil(rows / Math.max(1, Math.floor(u.bbox.height / devicePixelRatio / 13)));
        const found = [];
        for (let row = 0; row < rows; row += every) found.push(row + 0.5);
        return found;
      },
      values: (u, ticks) => ticks.map((tick) => (isNarrow() ? heat.narrow : heat.wide)[Math.floor(tick)] ?? ""),
    };
    const u = new uPlot({
      width: holder.clientWidth, height, legend: { show: false }, padding: [6, 24, 0, 0],
      series: [{}, { show: true, width: 0, points: { show: false } }],
      cursor: { ...cursor, y: true, points: { show: () => undefined } },
      scales: { x: { time: false, range: xRange }, y: { range: () => [0, rows], dir: -1 } },
      axes: axis,
      hooks: { draw: [paint, drawSessions], setCursor: [show], setScale: [onScale] },
    }, [xs, xs.map(() => null)], holder);
    u.readout = () => readout.textContent;
    register(u, holder, height);
    watchKeys(u, figure.querySelector("h3").textContent);
    show(null);
    const key = figure.querySelector(".ramp");
    key.style.background = `linear-gradient(90deg, ${VIRIDIS.map((c) => `rgb(${c})`).join(",")})`;
    figure.querySelector(".ramp-low").textContent = number(heat.low);
    figure.querySelector(".ramp-high").textContent = number(heat.high);
    figure.querySelector(".key-bad").hidden = !norms.includes(Infinity);
    figure.querySelector(".key-zero").hidden = !norms.includes(0);
  };

  data.charts.forEach(drawChart);
  if (data.heatmap) drawHeatmap(data.heatmap);

  // All numbers as a table, made when somebody opens it.
  const numbers = document.getElementById("numbers");
  numbers?.addEventListener("toggle", () => {
    const holder = numbers.querySelector("div");
    if (!numbers.open || holder.firstChild) return;
    const lines = data.charts.flatMap((chart) => chart.lines);
    const table = make("table"), head = table.createTHead().insertRow(), body = table.createTBody();
    table.createCaption().textContent = run.label;
    for (const text of ["step", "skipped", ...lines.map((line) => line.label)]) {
      const cell = make("th", "n", text);
      cell.scope = "col";
      head.append(cell);
    }
    run.x.forEach((x, bin) => {
      const row = body.insertRow();
      const texts = [stepText(bin).replace("step ", ""), run.skips[bin], ...lines.map((line) => number(line.y[bin]))];
      for (const text of texts) row.append(make("td", "n", text));
    });
    holder.append(table);
  });

  // Light and dark: the system's choice until the button is pressed.
  const themeButton = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const repaint = () => {
    palette = {};
    themeButton.textContent = isDark() ? "Light" : "Dark";
    plots.forEach((u) => u.redraw(false, true));
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    repaint();
  });
  dark.addEventListener("change", repaint);
  repaint();

  // On paper: light, and as wide as a page.
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    root.dataset.theme = "light";
    palette = {};
    plots.forEach((u) => u.fit(Math.min(u.width, 660)));
    repaint();
  });
  addEventListener("afterprint", () => {
    if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before;
    plots.forEach((u) => u.fit(u.root.parentElement.clientWidth));
    repaint();
  });
  root.dataset.drawn = String(plots.length);
})();
