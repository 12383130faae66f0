"use strict";
// Replaces the changing part of the page every second until the release has ended.
const live = document.getElementById("live");
const isOver = () => live.querySelector("[data-over]")?.dataset.over === "yes";
async function refresh() {
  try {
    const answer = await fetch(live.dataset.source, { credentials: "same-origin" });
    if (answer.status === 401) { location.reload(); return; }
    if (answer.ok) { live.innerHTML = await answer.text(); live.classList.remove("stale"); }
    else { live.classList.add("stale"); }
  } catch { live.classList.add("stale"); }
  if (!isOver()) { setTimeout(refresh, 1000); }
}
if (!isOver()) { setTimeout(refresh, 1000); }
