"use strict";
(() => {
  // Light, dark, or as the system has it.
  const button = document.getElementById("theme");
  const themes = [["auto", "light dark"], ["light", "light"], ["dark", "dark"]];
  let theme = 0;
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = (theme + 1) % themes.length;
    button.textContent = themes[theme][0];
    document.documentElement.style.colorScheme = themes[theme][1];
  });
  const list = document.getElementById("list");
  if (!list) return;

  const field = name => document.getElementById("f-" + name);
  const names = ["text", "target", "function", "feature", "status"];
  const cases = [...list.querySelectorAll(".case")].map(node => [node, node.textContent.toLowerCase()]);
  const shown = document.getElementById("shown");
  const form = document.getElementById("filters");
  const apply = () => {
    const [text, target, wanted, feature, status] = names.map(name => field(name).value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [node, content] of cases) {
      const data = node.dataset;
      const fits = (!target || data.target === target) && (!wanted || data.function === wanted)
        && (!feature || data.features.includes(` ${feature} `)) && (!status || data.status === status) && words.every(word => content.includes(word));
      node.hidden = !fits;
      count += fits;
    }
    shown.textContent = count + " of " + cases.length + " cases";
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));

  // A cell of the matrix, a row of the failures: filter, and open a case that is named.
  const open = node => {
    node.open = true;
    node.firstElementChild.focus();
    node.scrollIntoView({ block: "nearest" });
  };
  for (const link of document.querySelectorAll("a[data-target]")) {
    link.addEventListener("click", () => {
      form.reset();
      field("target").value = link.dataset.target;
      field("function").value = link.dataset.function;
      field("feature").value = link.dataset.feature;
      apply();
    });
  }
  const linked = () => {
    const node = location.hash.startsWith("#case-") && document.getElementById(location.hash.slice(1));
    if (!node) return;
    if (node.hidden) { form.reset(); for (const name of names) field(name).value = ""; apply(); }
    open(node);
  };
  addEventListener("hashchange", linked);

  // Arrow keys, Home and End go from case to case, Enter opens, Escape closes, / goes to the filter.
  list.addEventListener("keydown", event => {
    if (event.target.tagName !== "SUMMARY") return;
    const visible = cases.map(([node]) => node).filter(node => !node.hidden);
    const at = visible.indexOf(event.target.parentElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: visible.length - 1 }[event.key];
    if (event.key === "Escape") event.target.parentElement.open = false;
    if (to === undefined || !visible[to]) return;
    visible[to].firstElementChild.focus();
    event.preventDefault();
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "/" || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    field("text").focus();
    event.preventDefault();
  });

  // The characters of an error map (conformance/errormap.py) become squares when their case is opened.
  const levels = ".0123456789abcdefx";
  const beyond = ["10", "100", "1000", "1e4", "1e5"];
  const said = level => level === 0 ? "equal" : level <= 10 ? "up to " + 10 * level + " % of the budget"
    : level === 17 ? "beyond measure" : level === 16 ? "over 1e5 times the budget" : "up to " + beyond[level - 11] + " times the budget";
  const look = level => level === 0 ? "" : level <= 10 ? `class="in" fill-opacity="${(.12 + .08 * level).toFixed(2)}"`
    : level < 17 ? `class="over" fill-opacity="${(.45 + .11 * (level - 11)).toFixed(2)}"` : 'class="beyond"';
  const draw = pre => {
    const rows = pre.textContent.split("\n");
    const [down, across] = pre.dataset.pool.split(",").map(Number);
    const place = (at, size) => size > 1 ? `${at * size}-${at * size + size - 1}` : at;
    const square = (character, i, j) => {
      const mask = pre.dataset.kind === "mask", level = levels.indexOf(character);
      const kind = mask ? (character === "#" ? 'class="in"' : "") : look(level);
      const text = mask ? (character === "#" ? "True" : "False") : said(level);
      return `<rect x="${j}" y="${i}" width="1" height="1" ${kind}><title>[${place(i, down)}, ${place(j, across)}]: ${text}</title></rect>`;
    };
    const squares = rows.map((row, i) => [...row].map((character, j) => square(character, i, j)).join("")).join("");
    const holder = document.createElement("div");
    holder.innerHTML = `<svg viewBox="0 0 ${rows[0].length} ${rows.length}" width="${14 * rows[0].length}" role="img">${squares}</svg>`;
    holder.firstChild.setAttribute("aria-label", pre.dataset.label);
    pre.replaceWith(holder.firstChild);
  };
  list.addEventListener("toggle", event => {
    if (event.target.open) event.target.querySelectorAll("pre[data-pool]").forEach(draw);
  }, true);

  apply();
  linked();
})();
