"use strict";
// All of it works on whatever the page holds now: a watched page replaces its content.
const tip = document.getElementById("tip");
let data = {};

function read() {
  data = JSON.parse(document.getElementById("data").textContent);
}

function hide() {
  tip.hidden = true;
  document.querySelectorAll(".dot").forEach((dot) => dot.remove());
}

function point(event) {
  const canvas = event.target instanceof Element ? event.target.closest(".canvas") : null;
  const chart = canvas && data[canvas.closest(".chart").dataset.chart];
  if (!chart) return hide();
  const box = canvas.getBoundingClientRect();
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let best = null, nearest = 30 * 30;
  for (const mark of chart.marks) {
    const across = mark[0] * box.width - x, down = mark[1] * box.height - y;
    const distance = across * across + down * down;
    if (distance < nearest) { nearest = distance; best = mark; }
  }
  hide();
  if (!best) return;
  const dot = document.createElement("div");
  dot.className = "dot";
  dot.style.left = 100 * best[0] + "%";
  dot.style.top = 100 * best[1] + "%";
  canvas.append(dot);
  tip.textContent = best[2];
  tip.hidden = false;
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6)) + "px";
  tip.style.top = (event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18) + "px";
}

function sort(heading) {
  const table = heading.closest("table"), column = heading.cellIndex, body = table.tBodies[0];
  const rising = heading.getAttribute("aria-sort") !== "ascending";
  const value = (row) => {
    const cell = row.cells[column];
    return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent;
  };
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  const rows = [...body.rows].map((row) => [value(row), row]);
  const empty = (v) => Number.isNaN(v) || v === "";
  rows.sort(([a], [b]) => empty(a) - empty(b) || (rising ? 1 : -1) * compare(a, b));
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", rising ? "ascending" : "descending");
  body.append(...rows.map(([, row]) => row));
}

function download(key) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([data[key].csv], { type: "text/csv" }));
  link.download = key + ".csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

document.addEventListener("click", (event) => {
  const button = event.target instanceof Element ? event.target.closest("button") : null;
  if (button && button.matches(".sort")) sort(button.closest("th"));
  if (button && button.matches(".download")) download(button.dataset.csv);
});
document.addEventListener("pointermove", point);
document.addEventListener("pointerdown", point);
document.addEventListener("scroll", hide, { passive: true });
read();

// A watched page asks what is new, and takes over the sections that changed; how tables were sorted is kept.
let stamp = document.body.dataset.stamp;

async function refresh() {
  try {
    const told = await (await fetch("/stamp", { cache: "no-store" })).text();
    if (told !== stamp) {
      const answer = await fetch("/", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const sorted = [...document.querySelectorAll("th[aria-sort]")].map((heading) =>
        [heading.closest("table").id, heading.cellIndex, heading.getAttribute("aria-sort")]);
      document.querySelector("main").replaceWith(fresh.querySelector("main"));
      stamp = fresh.body.dataset.stamp;
      read();
      for (const [id, column, order] of sorted) {
        const heading = document.getElementById(id)?.tHead.rows[0].cells[column];
        if (heading) { sort(heading); if (order === "descending") sort(heading); }
      }
      hide();
    }
  } catch (error) {
    stamp = null; // should it come back, all is asked for again
    document.getElementById("state").textContent = "The server of this page has stopped; what is shown is the last it told.";
  }
  setTimeout(refresh, 2000);
}

if (stamp) refresh();
