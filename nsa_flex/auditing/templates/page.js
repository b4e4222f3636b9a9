// A click on a location copies it, for an editor to open.
for (const place of document.querySelectorAll(".where")) {
  place.title = "click to copy";
  place.style.cursor = "copy";
  place.onclick = () => navigator.clipboard?.writeText(place.textContent.split(" in ")[0]);
}
