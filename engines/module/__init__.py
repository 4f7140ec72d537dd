"""Any torch.nn.Module with example inputs, served by the same keeper, zygote, children and judge as a language model."""
