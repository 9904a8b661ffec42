"""``attn-opt``: run any pass on IR text (`attn-opt FILE -p 'pass{option=1},pass'`)."""

from __future__ import annotations

from xdsl.xdsl_opt_main import xDSLOptMain

from attn_engine.universe import DIALECTS, PASSES


class AttnOpt(xDSLOptMain):
    """The upstream driver, with our dialects and passes registered."""

    version_format = "attn-opt (xDSL {})"

    def register_all_dialects(self) -> None:
        super().register_all_dialects()
        for name, get in DIALECTS.items():
            if name not in self.ctx.registered_dialect_names:
                self.ctx.register_dialect(name, get)

    def register_all_passes(self) -> None:
        super().register_all_passes()
        for name, get in PASSES.items():
            if name not in self.available_passes:
                self.register_pass(name, get)


def main() -> None:
    AttnOpt().run()


if __name__ == "__main__":
    main()
