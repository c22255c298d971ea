// Light or dark, before the first paint: the one script that is no module, so that it runs at once.
{
  const KEY = "asyncllm.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const wanted = () => localStorage.getItem(KEY) ?? (dark.matches ? "dark" : "light");
  const apply = () => {
    root.dataset.theme = wanted();
    document.dispatchEvent(new Event("theme"));
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("toggle-theme").addEventListener("click", () => {
      const next = wanted() === "dark" ? "light" : "dark";
      const isSystem = next === (dark.matches ? "dark" : "light");
      if (isSystem) localStorage.removeItem(KEY); // follow the system again
      else localStorage.setItem(KEY, next);
      apply();
    });
  });
}
