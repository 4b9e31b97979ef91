"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const root = document.documentElement;
  const dark = () => root.dataset.theme === "dark";

  // Light or dark: as the system says, until the button is used.
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const button = document.getElementById("theme");
  function setTheme() {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    button.textContent = dark() ? "light" : "dark";
    button.setAttribute("aria-label", `switch to ${button.textContent} colours`);
    for (const plot of plots) plot.redraw();
  }
  const plots = [];
  system.addEventListener("change", setTheme);
  button.addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    setTheme();
  });

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  function encodings(spec) {
    if (Array.isArray(spec)) return spec.flatMap(encodings);
    if (!spec || typeof spec !== "object") return [];
    return [...(spec.encoding ? [spec.encoding] : []), ...encodings(spec.spec), ...encodings(spec.layer)];
  }

  function colours() {
    const style = getComputedStyle(root);
    const [ink, dim, line] = ["--ink", "--dim", "--line"].map((name) => style.getPropertyValue(name).trim());
    const text = { labelColor: dim, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" };
    return {
      background: "transparent",
      font: "system-ui, sans-serif",
      view: { stroke: null },
      axis: { ...text, gridColor: line, gridOpacity: 0.6, domainColor: dim, tickColor: dim },
      header: { labelColor: ink, labelFontSize: 12, labelLimit: 400 },
      rule: { color: dim },
      text: { color: ink },
    };
  }

  class View {
    constructor(plot) {
      this.plot = plot;
      this.section = document.getElementById(plot.id);
      this.place = this.section.querySelector(".view");
      this.rows = plot.rows.map((row) => {
        const record = {};
        plot.columns.forEach((name, i) => (record[name] = row[i]));
        return Object.assign({}, content.groups[record.g], record);
      });
      this.state = Object.fromEntries(plot.controls.map((control) => [control.name, control.value]));
      this.legend = plot.legends[0];
      this.hidden = new Set();
      this.drawing = Promise.resolve();
      this.addControls();
      this.addLegend();
    }

    addControls() {
      const place = this.section.querySelector(".controls");
      const select = (label, options, value, changed) => {
        const box = element("select");
        options.forEach(([, text], i) => box.append(element("option", { value: i }, text)));
        box.value = String(options.findIndex(([option]) => option === value));
        box.addEventListener("change", () => changed(options[Number(box.value)][0]));
        place.append(element("label", {}, label, box));
      };
      for (const control of this.plot.controls) {
        if (control.kind === "choice") {
          if (control.options.length > 1)
            select(control.label, control.options, control.value, (value) => this.set(control.name, value));
          continue;
        }
        const box = element("input", { type: "checkbox" });
        box.checked = control.value;
        box.addEventListener("change", () => {
          if (control.kind === "flag") return this.set(control.name, box.checked);
          this.state[control.name] = box.checked;
          this.redraw();
        });
        place.append(element("label", {}, box, control.kind === "log" ? "logarithmic x" : control.label));
      }
      if (this.plot.legends.length > 1) {
        const options = this.plot.legends.map((legend) => [legend, legend.name]);
        select("colours", options, this.legend, (legend) => {
          this.legend = legend;
          this.hidden.clear();
          this.addLegend();
          this.redraw();
        });
      }
    }

    addLegend() {
      const place = this.section.querySelector(".legend");
      place.replaceChildren();
      if (this.legend.entries.length < 2) return;
      const buttons = new Map();
      const show = () => {
        for (const [key, made] of buttons) made.setAttribute("aria-pressed", String(!this.hidden.has(key)));
        this.signal("hidden", [...this.hidden]);
      };
      for (const entry of this.legend.entries) {
        const made = element("button", { type: "button", "aria-pressed": "true" });
        made.innerHTML = '<svg width="22" height="8" aria-hidden="true"><line x1="0" x2="22" y1="4" y2="4" stroke-width="3"/></svg>';
        const line = made.querySelector("line");
        line.style.stroke = dark() ? entry.dark : entry.light;
        if (entry.dash[1]) line.setAttribute("stroke-dasharray", entry.dash.join(" "));
        made.append(entry.key);
        made.addEventListener("click", () => {
          if (!this.hidden.delete(entry.key)) this.hidden.add(entry.key);
          show();
        });
        buttons.set(entry.key, made);
        place.append(made);
      }
      if (this.legend.entries.length > 3) {
        const all = element("button", { type: "button", class: "all" }, "all / none");
        all.addEventListener("click", () => {
          if (this.hidden.size) this.hidden.clear();
          else for (const key of buttons.keys()) this.hidden.add(key);
          show();
        });
        place.append(all);
      }
      for (const [key, made] of buttons) made.setAttribute("aria-pressed", String(!this.hidden.has(key)));
    }

    set(name, value) {
      this.state[name] = value;
      if (name === "against") this.redraw(); // the axis has another name, too
      else this.signal(name, value);
    }

    // After the drawing under way, so that no change is lost.
    signal(name, value) {
      this.drawing = this.drawing.then(() => this.result && this.result.view.signal(name, value).runAsync());
    }

    redraw() {
      this.addLegend();
      this.drawing = this.drawing.then(() => this.draw()).catch((error) => console.error(this.plot.id, error));
    }

    specification() {
      const spec = structuredClone(this.plot.spec);
      spec.data = { values: this.rows };
      spec.params = [
        { name: "colour", value: this.legend.field },
        { name: "hidden", value: [...this.hidden] },
        ...this.plot.controls.filter((c) => c.kind !== "log").map((c) => ({ name: c.name, value: this.state[c.name] })),
      ];
      const domain = this.legend.entries.map((entry) => entry.key);
      const scales = {
        color: { domain, range: this.legend.entries.map((entry) => (dark() ? entry.dark : entry.light)) },
        strokeDash: { domain, range: this.legend.entries.map((entry) => entry.dash) },
      };
      const choices = this.plot.controls.find((control) => control.name === "against");
      const against = choices && choices.options.find(([value]) => value === this.state.against)[1];
      for (const encoding of encodings(spec)) {
        for (const channel of ["color", "strokeDash"])
          if (encoding[channel] && encoding[channel].field === "key") encoding[channel].scale = scales[channel];
        if (encoding.x && encoding.x.field === "x" && against) encoding.x.title = against;
        if (this.state.log && encoding.x && encoding.x.field === "x") encoding.x.scale = { ...encoding.x.scale, type: "log" };
      }
      const width = this.place.clientWidth;
      if (!spec.facet) {
        spec.width = width;
        spec.autosize = { type: "fit-x", contains: "padding" };
        return spec;
      }
      const panels = new Set(this.rows.map((row) => row[spec.facet.field])).size;
      const axis = 80; // its numbers, its title and the padding
      const narrowest = spec.spec.height < 200 ? 190 : 250; // pixels of a panel
      const most = Math.max(1, Math.min(panels, Math.floor((width - axis) / narrowest)));
      spec.columns = Math.ceil(panels / Math.ceil(panels / most)); // rows of equal length, as far as it goes
      spec.spacing = 24;
      spec.spec.width = Math.floor((width - axis - spec.spacing * (spec.columns - 1)) / spec.columns) - 4;
      spec.facet.header.labelLimit = spec.spec.width;
      if (panels > 1) spec.spec.height = Math.min(spec.spec.height, 240);
      return spec;
    }

    async draw() {
      if (this.result) this.result.finalize();
      this.result = await vegaEmbed(this.place, this.specification(), {
        actions: false,
        logLevel: 1, // errors only: it warns of every scale that has all its lines switched off
        renderer: this.rows.length > 4000 ? "canvas" : "svg", // many points are slow as elements
        config: colours(),
        tooltip: { theme: "custom" },
      });
      this.width = this.place.clientWidth;
      this.section.dataset.drawn = String(Number(this.section.dataset.drawn || 0) + 1);
    }
  }

  for (const plot of content.plots) plots.push(new View(plot));
  setTheme();

  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const plot of plots) if (plot.width !== plot.place.clientWidth) plot.redraw();
    }, 150);
  });

  // The table of runs sorts by its headers: numbers as numbers, empty cells last.
  const table = document.getElementById("runs");
  table.querySelectorAll("th").forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.key;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
  window.report = { plots }; // for the console, and for tests
})();
