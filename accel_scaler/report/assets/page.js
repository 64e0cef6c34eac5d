"use strict";
// Draws the charts of the report from the numbers in #data. One cursor and one zoom for all.
// Texts from the file are set as text, never as markup.
(() => {
  const run = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const plots = [];

  const make = (tag, className, text = "") => {
    const element = document.createElement(tag);
    element.className = className;
    element.textContent = text;
    return element;
  };

  // A canvas knows no variables of the style sheet: an element tells what they are now.
  const probe = root.appendChild(make("i", ""));
  probe.hidden = true;
  const hue = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };

  // Numbers as the summary writes them: four digits, integers in full.
  const number = (value) => {
    if (value === null) return "–";
    if (Number.isInteger(value) && Math.abs(value) < 2 ** 33) return String(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
      return value.toExponential(3).replace(/\.?0+e\+?/, "e");
    }
    return String(Number(value.toPrecision(4)));
  };

  const stepText = (place) => {
    const session = run.sessions.filter((start) => start <= run.x[place]).length;
    const step = `step ${run.x[place] - run.sessions[session - 1]}`;
    return run.sessions.length > 1 ? `${step} of session ${session}` : step;
  };

  // The numbers of all lines at the cursor; without one, the last.
  const makeReadout = (figure, chart) => {
    const holder = figure.querySelector(".readout");
    const head = make("span", "at");
    holder.append(head);
    const add = (label, sample) => {
      const value = make("b", "value");
      const entry = make("span", "entry");
      entry.append(sample, `${label} `, value);
      holder.append(entry);
      return value;
    };
    const values = chart.lines.map((line) => {
      const sample = make("i", "");
      const style = line.style === "dashed" ? "dashed" : "solid";
      sample.style.cssText = `width: 1.2rem; border-top: 3px ${style} var(--${line.hue})`;
      return add(line.label, sample);
    });
    const marked = chart.marks.map((marks) => {
      const sample = make("i", "", marks.edge === "top" ? "▼" : "|");
      sample.style.color = `var(--${marks.hue})`;
      return add(marks.label, sample);
    });
    return (place) => {
      head.textContent = place === null ? "last" : stepText(place);
      chart.lines.forEach((line, index) => {
        values[index].textContent = number(line.y[place ?? line.y.findLastIndex((y) => y !== null)]);
      });
      chart.marks.forEach((marks, index) => {
        marked[index].textContent = marks.places.includes(place) ? "here" : "";
      });
    };
  };

  // Axes.

  const first = run.x[0];
  const last = Math.max(run.x.at(-1), first + 1);
  const xRange = (u, low, high) => {
    if (low !== null && (low > first || high < run.x.at(-1))) return [low, high];
    const margin = 0.008 * (last - first);
    return [first - margin, last + margin];
  };
  const yRange = (scale) => (u, low, high) => {
    if (low === null) return [1, 10];
    if (scale === "linear") return uPlot.rangeNum(low, high, 0.1, true);
    const least = scale === "log2" ? 4 : 5; // so that there are ticks
    const margin = Math.max((high / low) ** 0.05, Math.sqrt((least * low) / high));
    return [low / margin, high * margin];
  };
  const tickTexts = (scale, ticks) => {
    const isWide = ticks.some((tick) => tick >= 1e6 || tick < 1e-2);
    if (scale !== "log2" || !isWide) return ticks.map(number);
    return ticks.map((tick) => `2^${Math.round(Math.log2(tick))}`);
  };
  // Powers of the base; of ten, where there are few, also twice and five times as much. uPlot's own
  // ticks never end on an axis beyond 1e16.
  const logTicks = (base) => (u, index, min, max) => {
    const [from, to] = [min, max].map((end) => Math.log(end) / Math.log(base));
    const most = u.bbox.height / devicePixelRatio / 25;
    const every = Math.ceil((to - from) / most);
    const factors = base === 10 && to - from < 3 ? [1, 2, 5] : [1];
    const ticks = [];
    for (let power = Math.floor(from / every) * every; power <= to + 1e-9; power += every) {
      ticks.push(...factors.map((factor) => factor * base ** power));
    }
    return ticks.filter((tick) => tick >= min * (1 - 1e-9) && tick <= max * (1 + 1e-9));
  };
  const line = () => hue("line");
  const axis = { stroke: () => hue("soft"), ticks: { stroke: line, size: 5 } };
  const integers = Array.from({ length: 36 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  const axes = (scale) => [
    { ...axis, grid: { show: false }, space: 80, incrs: integers },
    {
      ...axis,
      size: 62,
      ticks: { show: false },
      grid: { stroke: line, width: 1 },
      splits: scale === "linear" ? undefined : logTicks(scale === "log2" ? 2 : 10),
      filter: (u, ticks) => ticks,
      values: (u, ticks) => tickTexts(scale, ticks),
    },
  ];

  // What uPlot does not draw: where sessions begin, and marks.

  const clipped = (u, draw) => {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    draw(u.ctx, devicePixelRatio, top, top + height);
    u.ctx.restore();
  };

  const drawSessions = (u) => clipped(u, (ctx, pixel, top, bottom) => {
    ctx.strokeStyle = ctx.fillStyle = hue("soft");
    ctx.lineWidth = pixel;
    ctx.font = `${11 * pixel}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.setLineDash([pixel, 3 * pixel]);
    let free = -Infinity;
    run.sessions.forEach((start, index) => {
      const x = Math.round(u.valToPos(start, "x", true));
      if (index === 0 || x < free) return;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
      ctx.fillText(`session ${index + 1}`, x + 4 * pixel, top + 2 * pixel);
      free = x + 76 * pixel;
    });
  });

  const drawMarks = (u, chart) => clipped(u, (ctx, pixel, top, bottom) => {
    for (const marks of chart.marks) {
      ctx.strokeStyle = ctx.fillStyle = hue(marks.hue);
      ctx.lineWidth = 1.5 * pixel;
      const size = 4 * pixel;
      for (const place of marks.places) {
        const x = u.valToPos(run.x[place], "x", true);
        ctx.beginPath();
        if (marks.edge === "top") {
          ctx.moveTo(x - size, top);
          ctx.lineTo(x + size, top);
          ctx.lineTo(x, top + 2 * size);
          ctx.fill();
        } else {
          ctx.moveTo(x, bottom);
          ctx.lineTo(x, bottom - 3 * size);
          ctx.stroke();
        }
      }
    }
  });

  // Zoom by dragging, and the cursor by mouse or keys; all charts follow.

  const zoomButton = document.getElementById("zoom");
  const resetZoom = () => plots.forEach((u) => u.setScale("x", { min: first, max: last }));
  zoomButton.addEventListener("click", resetZoom);
  const onScale = (u) => {
    zoomButton.hidden = u.scales.x.min <= first && u.scales.x.max >= last;
  };

  const watchKeys = (u, figure) => {
    const set = (name, value) => u.over.setAttribute(name, value);
    const tell = (place) => {
      set("aria-valuenow", run.x[place]);
      set("aria-valuetext", figure.querySelector(".readout").textContent);
    };
    u.over.tabIndex = 0;
    set("role", "slider");
    set("aria-label", figure.querySelector("h3").textContent + ": arrow keys move the cursor");
    set("aria-valuemin", first);
    set("aria-valuemax", run.x.at(-1));
    tell(run.x.length - 1);
    u.over.addEventListener("keydown", (event) => {
      if (event.key === "Escape") resetZoom();
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      const from = u.cursor.idx ?? (move > 0 ? -1 : run.x.length);
      const place = Math.min(run.x.length - 1, Math.max(0, from + move));
      u.setCursor({ left: u.valToPos(run.x[place], "x"), top: 0 }, true, true);
      tell(place);
    });
  };

  const drawChart = (chart) => {
    const figure = document.getElementById("chart-" + chart.name);
    const holder = figure.querySelector(".plot");
    const height = chart.name === "loss" ? 290 : 230;
    const show = makeReadout(figure, chart);
    const series = [{}];
    const columns = [run.x];
    for (const line of chart.lines) {
      const gaps = new Set(line.gaps);
      // Numbers that no line reaches are points.
      const known = line.y.flatMap((y, at) => (y !== null || gaps.has(at) ? [at] : []));
      const isEnd = (at) => (line.y[known[at]] ?? null) === null;
      const alone = known.filter((_, at) => !isEnd(at) && isEnd(at - 1) && isEnd(at + 1));
      const isShort = line.y.filter((y) => y !== null).length < 3;
      series.push({
        stroke: () => hue(line.hue),
        width: 1.75,
        dash: line.style === "dashed" ? [5, 4] : undefined,
        paths: line.style === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: isShort, size: 6, filter: (u, index, show) => (show ? null : alone) },
      });
      // A line goes on over steps without a number (undefined), and stops at inf and NaN (null).
      columns.push(line.y.map((y, at) => y ?? (gaps.has(at) ? null : undefined)));
    }
    const scale = chart.scale;
    const distribution = { distr: scale === "linear" ? 1 : 3, log: scale === "log2" ? 2 : 10 };
    const u = new uPlot({
      width: holder.clientWidth,
      height,
      series,
      legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { dist: 4 }, y: false, points: { show: false } },
      scales: { x: { time: false, range: xRange }, y: { ...distribution, range: yRange(scale) } },
      axes: axes(scale),
      hooks: {
        drawAxes: [drawSessions],
        draw: [(made) => drawMarks(made, chart)],
        setCursor: [(made) => show(made.cursor.idx ?? null)],
        setScale: [onScale],
      },
    }, columns, holder);
    u.fit = (width) => u.setSize({ width, height });
    new ResizeObserver(() => u.fit(holder.clientWidth)).observe(holder);
    plots.push(u);
    show(null);
    watchKeys(u, figure);
  };
  run.charts.forEach(drawChart);

  // Light and dark: the system's choice until the button is pressed; on paper light.

  const themeButton = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme || (system.matches ? "dark" : "light")) === "dark";
  const paint = (scheme) => {
    root.style.colorScheme = scheme;
    themeButton.textContent = isDark() ? "Light" : "Dark";
    plots.forEach((u) => u.redraw(false, true));
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => paint(isDark() ? "light" : "dark"));
  system.addEventListener("change", () => paint(root.style.colorScheme));
  paint("");

  let before = "";
  addEventListener("beforeprint", () => {
    before = root.style.colorScheme;
    paint("light");
    plots.forEach((u) => u.fit(Math.min(u.width, 660)));
  });
  addEventListener("afterprint", () => {
    paint(before);
    plots.forEach((u) => u.fit(u.root.parentElement.clientWidth));
  });
  root.dataset.drawn = String(plots.length);
})();
