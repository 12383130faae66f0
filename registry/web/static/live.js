"use strict";
// Shows the page anew, in place, when the service says that something has happened. It never asks by itself but
// where `data-seconds` says that time alone changes the page.
const live = document.getElementById("live");
const status = document.getElementById("status");
const lost = document.getElementById("lost");
let lostAt = null;
let isBusy = false;
let isAsked = false;

function upToDate() {
  lostAt = null;
  lost.hidden = true;
  live.classList.remove("stale");
}

function outOfDate() {
  lostAt ??= new Date();
  lost.textContent = `Not up to date: no connection since ${lostAt.toISOString().slice(11, 19)} UTC.`;
  lost.hidden = false;
  live.classList.add("stale");
}

async function refresh() {
  if (isBusy) { isAsked = true; return; }
  isBusy = true;
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (answer.redirected) { location.reload(); return; }
    if (!answer.ok) { throw new Error(String(answer.status)); }
    const made = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    const focused = live.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const opened = [...live.querySelectorAll("details[open]")].map((one) => one.id);
    live.replaceChildren(...made.childNodes);
    for (const id of opened) { document.getElementById(id)?.setAttribute("open", ""); }
    if (focused) { live.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true }); }
    if (made.dataset.status !== live.dataset.status) {
      live.dataset.status = made.dataset.status;
      status.textContent = made.dataset.status;
    }
    upToDate();
  } catch {
    outOfDate();
    setTimeout(refresh, 2000);
  } finally {
    isBusy = false;
    if (isAsked) { isAsked = false; setTimeout(refresh, 150); }
  }
}

function listen(address) {
  const events = new EventSource(address);
  let last = address;
  events.onopen = upToDate;
  events.onmessage = (event) => {
    last = address.replace(/after=[^&]*/, `after=${encodeURIComponent(event.lastEventId)}`);
    refresh();
  };
  events.onerror = () => {
    outOfDate();
    // A browser gives up for good when the answer is not a stream: when it is not let in, or nobody is there.
    if (events.readyState === EventSource.CLOSED) { setTimeout(() => { refresh(); listen(last); }, 2000); }
  };
}

if (live.dataset.events) { listen(live.dataset.events); }
if (live.dataset.seconds) { setInterval(refresh, 1000 * Number(live.dataset.seconds)); }
