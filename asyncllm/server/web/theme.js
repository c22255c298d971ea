// Light or dark, before the first paint: the one script that is no module, so that it runs at once.
{
  const KEY = "asyncllm.theme";
  const { dataset } = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const system = () => (dark.matches ? "dark" : "light");
  const apply = () => {
    dataset.theme = localStorage.getItem(KEY) ?? system();
    document.dispatchEvent(new Event("theme"));
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => (document.getElementById("toggle-theme").onclick = () => {
    localStorage.setItem(KEY, dataset.theme === "dark" ? "light" : "dark");
    if (localStorage.getItem(KEY) === system()) localStorage.removeItem(KEY); // follow the system again
    apply();
  }));
}
