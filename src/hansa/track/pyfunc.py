"""The code that MLflow runs to serve a model ("models from code"); MLflow stores it with every model."""

from typing import Any

import mlflow
import torch
from mlflow.pyfunc import PythonModel


class HansaModel(PythonModel):  # type: ignore[misc]
    """The final model of a run; it prepares samples as in training."""

    def load_context(self, context: Any) -> None:
        from hansa.artifacts.saved_model import load

        self.model = load(context.artifacts["hansa"])

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def] # MLflow reads the types
        party = int((params or {}).get("party", 0)) if self.model.personal else None
        with torch.no_grad():
            return self.model.predict(model_input, party=party).cpu().numpy()


mlflow.models.set_model(HansaModel())
